"""The node's monitor: region files, pods and NVML in, metrics out."""
