"""`specscope verify`: is a run what it says it is? The capture alone decides; no model is needed."""
