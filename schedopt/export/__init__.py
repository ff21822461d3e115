"""Shows plans: text tables, Perfetto trace, DOT, JSON. Needs neither the model nor torch."""
