import itertools
import os
import pickle

from chainer_fp8pipe.images import CenterCrop, ImageFolder, folder

import chainer
import numpy
import pytest

from .folders import crop, make_folder, numbers


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / 'root')


def test_a_folder_is_a_data_set_of_chainers(root):
    data = ImageFolder(root, crop())
    assert len(data) == 12
    assert data.classes == ['class0', 'class1', 'class2']
    assert data.labels.tolist() == [number // 4 for number in range(12)]
    image, label = data[7]
    assert image.shape == (3, 8, 8)
    assert image.dtype == numpy.uint8
    assert label == 1
    assert label.dtype == numpy.int32
    assert numbers(data[2:5]) == [2, 3, 4]
    assert numbers([data[-1], data[-12]]) == [11, 0]
    with pytest.raises(IndexError):
        data[12]
    assert data.path(11).endswith('class2/011.png')


@pytest.mark.parametrize('kind', [
    chainer.iterators.SerialIterator,
    chainer.iterators.MultithreadIterator,
    lambda data, batch, repeat, shuffle: (
        chainer.iterators.MultiprocessIterator(
            data, batch, repeat, shuffle, n_processes=2))])
@pytest.mark.parametrize('cache', [None, 'memory'])
def test_chainers_own_iterators_go_through_it(root, kind, cache):
    data = ImageFolder(root, crop(), cache=cache)
    iterator = kind(data, 5, repeat=False, shuffle=True)
    found = list(itertools.chain(*map(numbers, iterator)))
    iterator.finalize()
    assert sorted(found) == list(range(12))
    assert data.cached()[0] == (12 if cache else 0)


def test_an_item_is_another_crop_each_time_but_the_same_in_the_next_run(root):
    data, again = ImageFolder(root, crop()), ImageFolder(root, crop())
    found = [data[3][0] for _ in range(4)]
    assert all((one == again[3][0]).all() for one in found)
    assert len({image.tobytes() for image in found}) > 1


@pytest.mark.parametrize(('options', 'message'), [
    ({'cache': 'disk'}, "cache='disk' is none of"),
    ({'on_error': 'ignore'}, "on_error='ignore' is none of"),
    ({'seed': -1}, 'seed=-1 must be 0 or more'),
    ({'seed': 1.5}, 'seed=1.5 is not a whole number'),
    ({'seed': 1 << 63}, 'is not below 2'),
    ({'cache': 'memory', 'cache_bytes': 1e6}, 'not a whole number'),
    ({'cache_bytes': 5}, "cache_bytes is for cache='memory'"),
    ({'cache': 'memory', 'cache_bytes': 1 << 60},
     r'more than the [\d,]+ bytes of memory that there are'),
    ({'cache': 'memory', 'cache_bytes': 10},
     r'cache_bytes=10 does not hold one sample: .*000\.png takes [\d,]+ '),
    ({'cache': 'decoded', 'cache_bytes': 3 * 24 * 20 - 1},
     'takes 1,440 bytes'),
    ({'shard': (3, 3)}, 'there is no shard 3 among 3'),
    ({'shard': 'all'}, 'neither a communicator nor'),
    ({'decoder': 'magic'}, 'magic'),
    ({'decoder': None}, 'decoder=None is no decoder'),
    ({'transform': 224}, r'transform=224 is no transform.*Crop\(224\)'),
    ({'transform': CenterCrop}, 'is no transform'),
])
def test_a_wrong_argument_is_an_error_that_names_it(root, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ImageFolder(root, **{'transform': crop(), **options})


def test_links_that_lead_to_themselves_are_left_out(root):
    for name in 'class0/loop.png', 'loop':
        os.symlink(os.path.join(root, name), os.path.join(root, name))
    data = ImageFolder(root, crop())
    assert (len(data), len(data.classes)) == (12, 3)


def test_a_folder_goes_to_another_process_unless_it_holds_a_cache(root):
    data = pickle.loads(pickle.dumps(ImageFolder(root, crop())))
    assert numbers([data[3]]) == [3]
    with pytest.raises(TypeError, match=r"cache='memory'.*iterator\(\)"):
        pickle.dumps(ImageFolder(root, crop(), cache='memory'))


@pytest.mark.parametrize(('given', 'options', 'message'), [
    ({}, {'batch': 0}, 'batch=0 must be 1 or more'),
    ({}, {'batch': 4.5}, 'batch=4.5 is not a whole number'),
    ({}, {'workers': -1}, 'workers=-1 must be 0 or more'),
    ({}, {'prefetch': -1}, 'prefetch=-1 must be 0 or more'),
    ({'shard': (0, 13)}, {'workers': 0}, 'at most 12 ranks'),
    ({'transform': None}, {}, 'give the ImageFolder a transform')])
def test_an_iterator_that_cannot_be_is_an_error(
        root, given, options, message):
    data = ImageFolder(root, **{'transform': crop(), **given})
    assert data[0][0].shape[0] == 3     # for this no transform is needed
    with pytest.raises(ValueError, match=message):
        data.iterator(**{'batch': 2, **options})


def test_numbers_may_be_of_numpy(root):
    found = []
    for kind in int, numpy.int64:
        data = ImageFolder(root, crop(), seed=kind(3))
        iterator = data.iterator(kind(5), kind(0), kind(1))
        found.append(next(iterator).images)
    assert (found[0] == found[1]).all()


def test_a_relative_folder_is_found_after_the_script_went_elsewhere(
        root, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    data = ImageFolder('root', crop())
    monkeypatch.chdir('/')
    assert data.path(0) == f'{tmp_path}/root/class0/000.png'
    assert numbers([data[7]]) == [7]


def test_shards_without_mpi_are_given_by_number(root):
    found = []
    for index in range(5):
        iterator = ImageFolder(root, crop(), shard=(index, 5)).iterator(
            1, workers=0, repeat=False)
        found.append([numbers(batch) for batch in iterator])
    assert {len(batches) for batches in found} == {2}
    assert sorted(itertools.chain(*itertools.chain(*found))) == list(
        range(12))


def test_half_of_the_available_memory_is_the_default_budget(
        root, monkeypatch):
    monkeypatch.setattr(folder, 'available_bytes', lambda: 123456)
    data = ImageFolder(root, crop(), cache='memory')
    assert data._reader.cache.budget == 123456 // 2
