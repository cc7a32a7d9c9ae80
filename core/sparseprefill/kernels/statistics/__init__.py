"""Small kernels behind the statistics: means of key tiles, selection by mass, distances."""
