"""Questions over many steps, answered from the evidence: what is rejected, and where the wanted token was."""
