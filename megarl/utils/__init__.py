"""Small helpers that several packages share: lossless JSON, text that can be encoded, kinds of IP addresses."""
