# Sourced by every job of the box.
export GLOO_SOCKET_IFNAME=hsn0  # a node's interface; ranks of a shaped point take the link of their GCD instead
