"""What Strata knows of each operator: how channels pass, how it is resized, what it allocates."""
