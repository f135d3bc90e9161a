"""What a job computes, holds and sends, and how long that takes. No torch, but to trace a module."""
