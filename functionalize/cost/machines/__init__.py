"""The machines that are planned for: their rates and their memory."""
