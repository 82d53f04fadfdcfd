"""What conditions are read from: rows, clips, images, camera paths, MultiCamVideo."""
