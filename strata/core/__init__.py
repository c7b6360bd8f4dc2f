"""What every room uses: errors, paths, sizes, seeds, files, processes."""
