"""Plans: everything that will be written, decided before the first byte is written."""
