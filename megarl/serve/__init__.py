"""A trainer as a service: clients of the public `tinker` SDK train and sample over HTTP. See README.md."""
