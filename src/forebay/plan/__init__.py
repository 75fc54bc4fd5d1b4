"""Know before you run: profiles of machines, what a run takes in memory and time, and which setting to choose."""
