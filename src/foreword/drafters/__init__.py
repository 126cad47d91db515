"""From what a user asks for to a drafter that is ready: spec, resolve, saved folders, shipped ones, auto, export."""
