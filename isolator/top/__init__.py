"""`isolator top`: what the tenants of a node hold of its GPUs, in a terminal."""
