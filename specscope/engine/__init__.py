"""Requests, their schedule, and the phases of a step."""
