"""From what a user asks for to a drafter that serves: spec, resolve, saved folders, shipped ones, auto, export."""
