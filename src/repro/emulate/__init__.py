"""Networks that are shaped like those of a cluster: between processes of this machine, and in the box."""
