"""Llama, Qwen and Aquila2: RMSNorm, rotary positions, SwiGLU, grouped heads."""
