"""What a job computes, holds and sends, and how long that takes. Torch only to trace modules."""
