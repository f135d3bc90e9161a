"""What will happen: boxes, tilings, meshes and plans. Frozen data and arithmetic only; no torch."""
