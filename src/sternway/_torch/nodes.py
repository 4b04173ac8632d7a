"""Node kinds by name, and the tensors that nodes save."""
