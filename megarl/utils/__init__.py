"""Small helpers shared by several packages: lossless JSON, encodable text, classification of IP addresses."""
