"""Llama, Qwen, Aquila2, Mixtral, OLMoE, DeepSeek: RMSNorm, rotary positions, SwiGLU, grouped heads
or latent attention, experts."""
