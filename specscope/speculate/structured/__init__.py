"""Structured output: grammars compiled by xgrammar, and which tokens they allow behind an output."""
