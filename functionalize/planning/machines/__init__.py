"""The machines that are planned for: their rates, their memory, and the memory that torch's allocator does not see."""
