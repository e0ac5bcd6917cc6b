"""A folder on a disk or at a URL: files that are complete or absent, a lock, a mirror on object storage."""
