"""Growth curves, what the API server takes for our requests, and a model of a large cluster made of both."""
