"""What each axis of a mesh divides, and into what: data and arithmetic, one folder an axis."""
