"""How far prompts are durable and can be restored: counted when asked, watched, and awaited."""
