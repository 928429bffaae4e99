// The chats of this browser: kept in its storage until the user deletes them, and sent nowhere.

const KEY = "chats";
const MOST = 50;
const TITLE = 60;

// Newest first: { id, title, messages }.
export function all() {
  try {
    const found = JSON.parse(localStorage.getItem(KEY));
    return Array.isArray(found) ? found : [];
  } catch {
    return []; // damaged
  }
}

export function keep(id, messages, title) {
  store([{ id, title: title.slice(0, TITLE), messages }, ...all().filter((chat) => chat.id !== id)].slice(0, MOST));
}

export function remove(id) {
  store(all().filter((chat) => chat.id !== id));
}

export function removeAll() {
  localStorage.removeItem(KEY);
}

function store(chats) {
  try {
    localStorage.setItem(KEY, JSON.stringify(chats));
  } catch {
    if (chats.length > 1) store(chats.slice(0, Math.floor(chats.length / 2))); // the storage is full: the oldest go
  }
}
