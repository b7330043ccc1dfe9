"""The processes of a run: started, watched, signalled, and what is said when one is lost."""
