"""Called by name on the last rank once a save is final."""


def on_save_checkpoint_success(checkpoint_path, tracker_filename, save_dir, iteration): ...
