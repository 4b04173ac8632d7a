"""What goes wrong in a run: lost ranks, gradients that are not finite, and the reports about them."""
