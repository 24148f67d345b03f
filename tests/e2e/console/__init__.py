"""The console in a real browser: every view, both themes, the keyboard, and what people do with it."""
