"""What the measured costs make of a large cluster."""
