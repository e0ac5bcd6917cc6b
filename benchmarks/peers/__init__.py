"""The programs that are compared, one short file each. `entry.main` of each trains without end and counts its steps."""
