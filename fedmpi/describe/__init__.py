"""What `fedmpi inspect` and `fedmpi estimate` show."""
