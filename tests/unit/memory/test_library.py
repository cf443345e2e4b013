"""A user's folder of files: what it holds, what is found in it, what goes, and what a crash leaves."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.on_disk import having, small_files
from support.s3_server import KEY_ID, SECRET, S3Server, s3_server

from services.memory.blobs import Blobs, BlobsAway, FolderBlobs
from services.memory.bucket import BucketBlobs
from services.memory.chunks import Chunk
from services.memory.documents import least_similarity_for, ranked
from services.memory.incoming import created
from services.memory.library import Library, LibraryDamaged, LibraryFull, Limits
from services.memory.passages import File, Passage
from services.memory.vectors import Space, Vector
from shared.participant.retention import Census
from shared.participant.store_marker import remove_marker

LIMITS = Limits(files=3, bytes=1_000)
SPACE = Space("m", 2)


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    with s3_server() as one:
        yield one


def bucket(store: S3Server, secret: str = SECRET) -> BucketBlobs:
    return BucketBlobs("s3://files/some/where", store.url, "eu-1", KEY_ID, secret)


class Recorded:
    """Blobs of a library, and the owners of the files that were kept.

    keeps: whether a kept file stays there. dies: the process is interrupted after it has kept a file.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self.keeps, self.dies = True, False
        self.owners: dict[str, str] = {}
        self.there, self.content = blobs.there, blobs.content
        self.drop, self.drop_all, self.left = blobs.drop, blobs.drop_all, blobs.left

    def keep(self, path: Path, owner: str, digest: str) -> None:
        self.owners[digest] = owner
        self._blobs.keep(path, owner, digest)
        if not self.keeps:
            self.drop(owner, digest)
        if self.dies:
            raise KeyboardInterrupt


@pytest.fixture(params=["folder", "bucket"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Recorded:
    """Files in a folder, and files in a bucket."""
    if request.param == "folder":
        return Recorded(FolderBlobs(tmp_path / "documents"))
    store: S3Server = request.getfixturevalue("store")
    store.objects.clear()
    return Recorded(bucket(store))


@pytest.fixture
def library(blobs: Recorded, tmp_path: Path) -> Library:
    return Library(tmp_path / "documents", blobs)


def content(library: Library, user: str, file: File) -> bytes | None:
    """None: it is gone."""
    try:
        found = library.content(user, file)
    except FileNotFoundError:
        return None
    return found if isinstance(found, bytes) else found.read_bytes()


def add(
    library: Library,
    text: str,
    user: str = "ann",
    name: str = "a.txt",
    *,
    read: bool = True,
    expires: int | None = None,
) -> tuple[File, bool]:
    path = library.fresh()
    path.write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return library.add(user, path, name, "text/plain", digest, read=True, expires=expires, most=LIMITS)


def filled(library: Library, text: str, *chunks: Chunk, user: str = "ann", title: str = "") -> File:
    file, _ = add(library, text, user)
    library.fill(user, file.id, title, chunks or [Chunk("", text)])
    there = library.file(user, file.id)
    assert there is not None
    return there


def texts(found: list[Passage]) -> set[str]:
    return {passage.text for passage in found}


def test_the_same_content_is_one_file_of_a_user_and_another_ones_too(library: Library) -> None:
    file, new = add(library, "one", name="first.txt")
    again, newer = add(library, "one", name="second.txt")
    assert (new, newer, again.id, again.name) == (True, False, file.id, "first.txt")
    other, fresh = add(library, "one", "bob")
    assert fresh
    assert other.id != file.id
    assert library.file("bob", file.id) is None
    assert content(library, "ann", file) == b"one"


def test_a_user_keeps_no_more_files_and_bytes_than_allowed(library: Library) -> None:
    for text in ("one", "two", "three"):
        add(library, text)
    with pytest.raises(LibraryFull, match="you keep 3 files, which is as many as one user may: remove one first"):
        add(library, "four")
    add(library, "one")
    add(library, "x" * 900, "bob")
    with pytest.raises(LibraryFull, match="one user may keep 1000: remove some first"):
        add(library, "y" * 200, "bob")
    assert library.count("ann") == 3
    assert library.count("bob") == 1


def test_files_are_listed_newest_first_page_by_page(library: Library) -> None:
    names = [add(library, text)[0].id for text in ("one", "two", "three")]
    page = library.files("ann", 2)
    assert [file.id for file in page] == names[:0:-1]
    assert [file.id for file in library.files("ann", 2, page[-1].n)] == names[:1]
    assert library.files("nobody", 5) == []


def test_what_is_read_is_found_by_words_and_by_meaning(library: Library) -> None:
    filled(library, "t", Chunk("page 1", "The warranty lasts two years"), Chunk("page 2", "Clean the filter monthly"))
    bare = library.bare("ann", SPACE, 10)
    assert [one.chunk.place for one in bare] == ["page 1", "page 2"]
    library.place("ann", [(bare[0].n, Vector("m", (1.0, 0.0))), (bare[1].n, Vector("m", (0.0, 1.0)))])
    assert library.bare("ann", SPACE, 10) == []
    by_words = library.search("ann", "how long is the warranty?", None, 5)
    assert [(one.place, one.similarity) for one in by_words] == [("page 1", None)]
    by_meaning = library.search("ann", "wash it", Vector("m", (0.0, 1.0)), 1)
    assert [(one.place, one.similarity, one.words) for one in by_meaning] == [("page 2", 1.0, 0.0)]
    # vectors of another model are not compared
    assert library.search("ann", "wash it", Vector("other", (0.0, 1.0)), 1) == []
    assert len(library.bare("ann", Space("other", 2), 10)) == 2


def test_full_disk_is_reported_and_loses_nothing(library: Library) -> None:
    file = filled(library, "the cat sat")
    with small_files(200_000):
        with pytest.raises(BlobsAway, match="cannot be written: disk I/O error"):
            library.fill("ann", file.id, "t", [Chunk("page 1", "a word and " * 50_000)])
        library.tidy()
    assert library.damage is None
    assert texts(library.search("ann", "cat", None, 5)) == {"the cat sat"}
    library.fill("ann", file.id, "t", [Chunk("page 1", "the dog sat")])
    assert texts(library.search("ann", "sat", None, 5)) == {"the dog sat"}


def test_a_search_can_be_bound_to_files(library: Library) -> None:
    one, two = filled(library, "the cat sat"), filled(library, "the cat ran")
    assert texts(library.search("ann", "cat", None, 5)) == {"the cat sat", "the cat ran"}
    assert texts(library.search("ann", "cat", None, 5, [two.id])) == {"the cat ran"}
    assert library.search("ann", "cat", None, 5, [one.id + "x"]) == []


def test_nobody_finds_what_is_another_users(library: Library) -> None:
    file = filled(library, "the secret recipe", user="bob")
    assert library.search("ann", "secret recipe", Vector("m", (1.0, 0.0)), 5) == []
    assert not library.remove("ann", file.id)
    assert library.file("bob", file.id) is not None


def test_words_of_a_hostile_query_are_words(library: Library) -> None:
    filled(library, 'say "NEAR" OR * and drop')
    for query in ('" OR 1', "a* NEAR(b)", "'; DROP TABLE file", "\0", "", "NOT", "-x", "said:words"):
        library.search("ann", query, None, 5)
    assert texts(library.search("ann", "near", None, 5)) == {'say "NEAR" OR * and drop'}


def test_reading_again_replaces_what_was_read(library: Library) -> None:
    file = filled(library, "t", Chunk("", "first reading"))
    library.fill("ann", file.id, "Title", [Chunk("", "second reading")], "cut")
    found = library.search("ann", "reading", None, 5)
    assert texts(found) == {"second reading"}
    assert (found[0].file.title, found[0].file.reason, found[0].file.chars) == ("Title", "cut", 14)
    assert library.search("ann", "first", None, 5) == []


def test_a_removed_file_leaves_nothing_on_the_disk(library: Library, tmp_path: Path) -> None:
    secret = "xylophone-secret"
    file = filled(library, secret)
    kept = filled(library, "kept text")
    assert library.remove("ann", file.id)
    assert not library.remove("ann", file.id)
    library.fill("ann", file.id, "", [Chunk("", secret)])
    assert library.search("ann", "xylophone", None, 5) == []
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path
    assert content(library, "ann", file) is None
    assert content(library, "ann", kept) == b"kept text"


def test_everything_of_a_user_goes_at_once(library: Library, tmp_path: Path) -> None:
    filled(library, "one")
    filled(library, "two")
    filled(library, "other", user="bob")
    assert library.users() == ["ann", "bob"]
    assert library.remove_user("ann") == 2
    assert library.users() == ["bob"]
    assert library.files("ann", 5) == []
    assert library.remove_user("ann") == 0


def test_a_failed_file_is_read_again_when_it_is_added_again(library: Library) -> None:
    file, _ = add(library, "one")
    library.fail("ann", file.id, "damaged")
    there = library.file("ann", file.id)
    assert there is not None
    assert (there.state, there.reason, library.unread("ann")) == ("failed", "damaged", [])
    again, new = add(library, "one")
    assert (again.state, again.reason, new, library.unread("ann")) == ("reading", "", False, [file.id])


def test_bytes_that_were_lost_come_back_with_the_same_file(library: Library, blobs: Recorded) -> None:
    file, _ = add(library, "one")
    blobs.drop(blobs.owners[file.hash], file.hash)
    assert content(library, "ann", file) is None
    add(library, "one")
    assert content(library, "ann", file) == b"one"


def test_what_is_over_and_what_a_crash_left_goes_and_nothing_else(library: Library, blobs: Recorded) -> None:
    now = 1_900_000_000.0
    kept, _ = add(library, "kept")
    over, _ = add(library, "over", expires=int(now * 1000) - 1)
    later, _ = add(library, "later", expires=int(now * 1000) + 1)
    half, orphan = library.fresh(), replace(kept, hash="0" * 64)
    for path in (half, moved := library.fresh()):
        path.write_text("left behind")
    blobs.keep(moved, blobs.owners[kept.hash], orphan.hash)
    # Another process is still receiving the file.
    with created(fresh := library.fresh()):
        library.tidy(now)
        assert [half.exists(), fresh.exists()] == [False, True]
    library.tidy(now)
    assert not fresh.exists()
    assert {file.id for file in library.files("ann", 9)} == {kept.id, later.id}
    assert [content(library, "ann", one) for one in (kept, later, orphan, over)] == [b"kept", b"later", None, None]


def test_what_a_crash_left_of_a_users_only_file_goes(library: Library, blobs: Recorded) -> None:
    left = [add(library, "one")[0], add(library, "two", "zoe")[0]]
    library.remove("ann", left[0].id)
    library.remove("zoe", left[1].id)
    blobs.dies = True
    # It was eve's first file.
    for user, text in (("ann", "one"), ("eve", "two")):
        with pytest.raises(KeyboardInterrupt):
            add(library, text, user)
    eve = replace(left[1], id="")
    assert content(library, "ann", left[0]) == b"one"
    assert content(library, "eve", eve) == b"two"
    library.tidy(4_000_000_000.0)
    assert content(library, "ann", left[0]) is None
    assert content(library, "eve", eve) is None


def later_version(database: Path) -> None:
    with closing(sqlite3.connect(database)) as db:
        db.execute("PRAGMA user_version = 99")


# What is done to ann's database, and how it is reported.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "garbled": (lambda path: path.write_bytes(b"no database at all" * 500), "file is not a database"),
    "cut off": (lambda path: os.truncate(path, 8_192), "database disk image is malformed"),
    "emptied": (lambda path: os.truncate(path, 0), "library.db is empty"),
    "gone": (os.unlink, "library.db is gone"),
    "version": (later_version, "library.db has version 99, this release reads 1"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_library_raises_and_keeps_its_files(library: Library, tmp_path: Path, damage: str) -> None:
    file = filled(library, "one")
    (database,) = tmp_path.rglob("library.db")
    theirs, _ = add(library, "theirs", user="bob")
    assert library.damage is None
    change, reason = DAMAGE[damage]
    change(database)
    for call in (
        library.users,
        lambda: library.files("ann", 5),
        lambda: library.file("ann", file.id),
        lambda: library.search("ann", "one", None, 5),
        lambda: library.remove("ann", file.id),
        lambda: add(library, "two"),
    ):
        with pytest.raises(LibraryDamaged, match=rf"{reason}.*doctor --repair.*restore --merge"):
            call()
    library.tidy(4_000_000_000.0)
    assert content(library, "ann", file) == b"one"
    assert reason in (library.damage or "")
    # the work for all users leaves her out
    assert library.readable_users() == ["bob"]
    assert [library.older(user, 4_000_000_000_000) for user in ("ann", "bob")] == [[], [theirs.id]]
    assert library.census(4_000_000_000_000) == Census(1, theirs.added, 1)


def test_user_with_a_damaged_library_can_be_removed(library: Library, tmp_path: Path) -> None:
    file = filled(library, "one")
    (database,) = tmp_path.rglob("library.db")
    os.truncate(database, 0)
    with pytest.raises(LibraryDamaged):
        library.count("ann")
    assert library.remove_user("ann") == 1
    assert (library.damage, content(library, "ann", file), library.users()) == (None, None, [])
    again, new = add(library, "one")
    assert (again.id, new) == (file.id, True)


def test_library_of_an_older_release_is_watched_after_the_start(library: Library, tmp_path: Path) -> None:
    filled(library, "one")
    (database,) = tmp_path.rglob("library.db")
    remove_marker(database)
    library.tidy()
    database.unlink()
    with pytest.raises(LibraryDamaged, match=r"library\.db is gone"):
        library.files("ann", 5)


@pytest.mark.parametrize("dies", [False, True])
def test_of_a_removed_file_no_word_stays_on_the_disk(
    library: Library, blobs: Recorded, tmp_path: Path, dies: bool
) -> None:
    """Also where the process that removed it, or was overwriting it, has died."""
    gone = filled(library, "gone", *(Chunk(f"p{n}", f"xylographs {n} and others") for n in range(300)))
    filled(library, "stays", Chunk("", "quetzals and others"))
    assert library.remove("ann", gone.id)
    if dies:
        library = Library(tmp_path / "documents", blobs)
        library.tidy()
        assert library.overwrite("ann")
        library = Library(tmp_path / "documents", blobs)
        library.tidy()
    assert library.unclean == {"ann"}
    while library.overwrite("ann"):
        pass
    assert not library.unclean
    assert having("xylograph", tmp_path) == []
    assert having("quetzal", tmp_path)
    assert texts(library.search("ann", "others", None, 5)) == {"quetzals and others"}
    library.tidy()
    assert not library.unclean


def test_a_file_that_is_added_for_good_does_not_expire_any_more(library: Library) -> None:
    assert add(library, "one", expires=1)[0].expires == 1
    assert add(library, "one", expires=5)[0].expires == 5
    assert add(library, "one", expires=2)[0].expires == 5
    assert add(library, "one")[0].expires is None
    assert add(library, "one", expires=9)[0].expires is None


def test_a_change_that_fails_changes_nothing(library: Library) -> None:
    file = filled(library, "t", Chunk("", "first reading"))
    with pytest.raises((sqlite3.Error, AttributeError)):
        library.fill("ann", file.id, "", [Chunk("", "second"), None])  # type: ignore[list-item]
    assert texts(library.search("ann", "reading", None, 5)) == {"first reading"}


def test_several_writers_take_turns(tmp_path: Path) -> None:
    roomy = Limits(100, 10_000)

    def write(number: int) -> None:
        own = Library(tmp_path)
        for at in range(5):
            path = own.fresh()
            path.write_text(f"{number} {at}")
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            file, _ = own.add("ann", path, "a", "text/plain", digest, read=True, expires=None, most=roomy)
            own.fill("ann", file.id, "", [Chunk("", f"common words {number} {at}")])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Library(tmp_path).search("ann", "common", None, 50)) == 20


def test_passages_that_have_nothing_to_do_with_the_query_are_left_out(library: Library) -> None:
    file = filled(library, "t")

    def passage(n: int, similarity: float | None, words: float) -> Passage:
        return Passage(n, file, "", "", similarity, words)

    found = ranked([passage(1, 0.1, 0.1), passage(2, 0.8, 0.0), passage(3, None, 0.9), passage(4, 0.8, 0.9)], 0.3)
    assert [one.passage.n for one in found] == [4, 3, 2]
    assert all(0 < one.relevance <= 1 for one in found)


@pytest.mark.parametrize(
    ("model", "least"), [("all-minilm", 0.2), ("All-MiniLM-L6-v2", 0.2), ("nomic-embed-text", 0.3)]
)
def test_least_similarity_of_passages_belongs_to_the_model(model: str, least: float) -> None:
    assert least_similarity_for(model) == least


# ── a bucket ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_bucket_has_the_bytes_under_user_and_content_and_the_folder_has_none(store: S3Server, tmp_path: Path) -> None:
    store.objects.clear()
    library = Library(tmp_path, bucket(store))
    secret = b"xylophone-secret"
    file, _ = add(library, secret.decode())
    assert {name: data for name, (data, _) in store.objects.items()} == {
        f"some/where/{hashlib.sha256(b'ann').hexdigest()[:32]}/{file.hash}": secret
    }
    assert not any(secret in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    add(library, "bob's", "bob")
    assert library.remove_user("ann") == 1
    assert [data for data, _ in store.objects.values()] == [b"bob's"]


def test_what_one_user_may_not_keep_is_not_left_in_it(store: S3Server, tmp_path: Path) -> None:
    store.objects.clear()
    library = Library(tmp_path, bucket(store))
    for text in ("one", "two", "three"):
        add(library, text)
    with pytest.raises(LibraryFull):
        add(library, "four")
    # what is there already is no further file
    add(library, "one")
    assert sorted(data for data, _ in store.objects.values()) == [b"one", b"three", b"two"]


def test_a_bucket_that_is_away_takes_nothing_and_forgets_nothing(store: S3Server, tmp_path: Path) -> None:
    store.objects.clear()
    library = Library(tmp_path, bucket(store))
    file, _ = add(library, "one")
    store.away = True
    try:
        for attempt in (
            lambda: add(library, "two"),
            lambda: library.remove("ann", file.id),
            lambda: library.remove_user("ann"),
            lambda: library.content("ann", file),
        ):
            with pytest.raises(BlobsAway, match="does not answer as it should"):
                attempt()
    finally:
        store.away = False
    assert [one.id for one in library.files("ann", 5)] == [file.id]
    assert content(library, "ann", file) == b"one"


def test_a_key_that_is_refused_is_told_without_its_secret(store: S3Server, tmp_path: Path) -> None:
    wrong = BucketBlobs("s3://files", store.url, "eu-1", "another-id", SECRET)
    with pytest.raises(BlobsAway, match="does not answer as it should") as refused:
        add(Library(tmp_path, wrong), "one")
    assert SECRET not in str(refused.value)


def test_a_file_that_is_removed_while_it_comes_is_not_there_without_its_bytes(
    library: Library, blobs: Recorded
) -> None:
    blobs.keeps = False
    with pytest.raises(BlobsAway, match="add it again"):
        add(library, "one")
    assert library.files("ann", 5) == []
