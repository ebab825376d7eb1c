"""The verbs that judge a capture: why, verify, audit, locate, diagnose."""
