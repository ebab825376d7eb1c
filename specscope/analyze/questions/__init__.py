"""Questions over many steps, answered from the evidence: what is rejected, how well q is calibrated, when, and why."""
