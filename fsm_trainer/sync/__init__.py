"""Weight push: manifest, buckets, acknowledgement, checksums."""
