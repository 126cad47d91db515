"""Turn what a user asks for into a drafter that is ready: specs, folders of trained drafters, shipped drafters, `auto`."""
