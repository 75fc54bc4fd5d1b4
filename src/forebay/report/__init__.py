"""What forebay shows about a run: traces, proofs, sweeps, memory."""
