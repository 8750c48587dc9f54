"""Programs compared: one graph at several lengths, with integers that are functions of the sizes of arguments."""
