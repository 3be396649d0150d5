"""What a user may have meant: hints in the errors for mistakes that new users make."""
