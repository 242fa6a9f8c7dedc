"""What the engines are compared with, on the same model code."""
