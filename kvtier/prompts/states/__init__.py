"""How far prompts are durable: counted when asked, and watched."""
