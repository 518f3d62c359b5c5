"""What the service measures of itself and of the requests that pass it, for Prometheus."""
