"""Small helpers that several packages share: paths, text, plugins, lossless JSON."""
