"""An engine process: takes requests from the front ends and steps the engine."""
