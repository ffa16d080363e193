"""How the lanes of one device share it: in turn, in threads, or in processes."""
