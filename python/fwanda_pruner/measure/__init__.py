"""What is summed up while text goes through a model."""
