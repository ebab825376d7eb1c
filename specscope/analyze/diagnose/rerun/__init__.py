"""The part of diagnose that runs models under named mistakes: it imports torch, and is imported when it runs."""
